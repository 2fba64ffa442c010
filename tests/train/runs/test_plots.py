"""The loss plot shows the rows that there are, with names and units on its axes."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.runs.plots import loss_figure, plot_losses
from nsa.train.telemetry.metrics import MetricsWriter, Row

ROWS: list[Row] = [
    {"step": 10, "tokens": 1000, "loss_nats": 5.0, "bits_per_byte": 7.0},
    {"step": 20, "tokens": 2000, "loss_nats": 4.0, "bits_per_byte": 6.0, "val_loss_nats": 4.5, "val_bits_per_byte": 6.5},
    {"step": 30, "tokens": 3000, "loss_nats": 3.0, "bits_per_byte": 5.0},
]


def points(axes: Axes) -> dict[object, list[tuple[float, float]]]:
    return {line.get_label(): [(x, y) for x, y in np.asarray(line.get_xydata()).tolist()] for line in axes.lines}


def test_lines_are_the_rows_and_axes_have_units() -> None:
    figure = loss_figure(ROWS, title="a run")
    left, right = figure.axes
    assert points(left) == {"training": [(10, 5.0), (20, 4.0), (30, 3.0)], "held out": [(20, 4.5)]}
    assert points(right) == {"training": [(10, 7.0), (20, 6.0), (30, 5.0)], "held out": [(20, 6.5)]}
    assert [axes.get_ylabel() for axes in (left, right)] == ["loss (nats per token)", "loss (bits per byte of text)"]
    assert {axes.get_xlabel() for axes in (left, right)} == {"optimizer steps"}
    (above,) = left.child_axes
    assert above.get_xlabel() == "tokens"
    figure.savefig(io.BytesIO())  # scales are set when it is drawn
    assert above.get_xlim() == pytest.approx([100 * limit for limit in left.get_xlim()])


def test_png_is_written_also_with_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", TrainConfig())
    writer = MetricsWriter(folder)
    assert plot_losses(folder.metrics_jsonl, folder.loss_png) is False
    assert not folder.loss_png.exists()
    last: Row = {"step": 40, "tokens": 4000, "loss_nats": math.nan, "bits_per_byte": math.inf}
    for row in [*ROWS, last]:
        writer.write(row)
    writer.close()
    assert plot_losses(folder.metrics_jsonl, folder.loss_png, title="run") is True
    height, width = imread(folder.loss_png).shape[:2]
    assert width > 1000
    assert height > 400
    assert not list(folder.path.glob("*.tmp"))
