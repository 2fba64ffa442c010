"""Plots show the rows that were written."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.runs.page import LOSSES, Curve, curves_figure, plot_losses
from nsa.train.telemetry.metrics import MetricsWriter, Row

VALIDATED = {"val_loss_nats": 4.5, "val_bits_per_byte": 6.5}
ROWS: list[Row] = [
    {"step": 10, "tokens": 1000, "loss_nats": 5.0, "bits_per_byte": 7.0},
    {"step": 20, "tokens": 2000, "loss_nats": 4.0, "bits_per_byte": 6.0, **VALIDATED},
    {"step": 30, "tokens": 3000, "loss_nats": 3.0, "bits_per_byte": 5.0},
]


def test_lines_and_dots_are_the_rows() -> None:
    curves = [Curve("a", "red", ROWS), Curve("b", "blue", ROWS, 100)]
    figure = curves_figure(curves, LOSSES, "tokens")
    expected = ([5, 4, 3], 4.5), ([7, 6, 5], 6.5)
    for axes, (losses, validation) in zip(figure.axes, expected, strict=True):
        lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
        for scale, (line, dots) in zip((1, 100), (lines[:2], lines[2:]), strict=True):
            assert line == [[10 * scale * n, loss] for n, loss in enumerate(losses, start=1)]
            assert dots == [[20 * scale, validation]]
        assert axes.get_xlabel() == "tokens"
        legend = axes.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    assert [axes.get_title() for axes in figure.axes] == ["nats per token", "bits per byte of text"]


def test_png_is_written_also_with_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", TrainConfig())
    assert plot_losses(folder.metrics_jsonl, folder.loss_png) is False
    assert not folder.loss_png.exists()
    writer = MetricsWriter(folder)
    for row in ROWS:
        writer.write(row)
    writer.write({"step": 40, "tokens": 4000, "loss_nats": math.nan, "bits_per_byte": math.inf})
    writer.close()
    assert plot_losses(folder.metrics_jsonl, folder.loss_png, title="run") is True
    height, width = imread(folder.loss_png).shape[:2]
    assert width > 1000
    assert height > 400
    assert not list(folder.path.glob("*.tmp"))
