"""``nsa inspect``; everything heavy is imported when it runs."""

from __future__ import annotations

from json import dumps
from pathlib import Path

from nsa.cli.evaluation import Device
from nsa.errors import check_output


def inspect(
    run: str,
    *,
    checkpoint: str = "last",
    device: Device = "auto",
    text: str | None = None,
    tokens: int | None = None,
    json: bool = False,
    output: Path | None = None,
    record: Path | None = None,
) -> int:
    """Look at what the layers of a model do with a text.

    Which blocks they select, how far back and how much alike for neighbouring queries, and their
    gates: a line for each layer of RUN, a page with heat maps and curves, and all figures as JSON.
      nsa inspect runs/cpu-small-1
      nsa inspect runs/cpu-small-1 --text letters.txt --tokens 4096 --json

    Args:
        run: run folder, for example runs/cpu-small-1
        checkpoint: last, best or a step
        device: where to compute
        text: file or folder of text, - for standard input (default the run's validation text)
        tokens: tokens to read, the first ones (default as many as a sequence of the run)
        json: one JSON object instead of lines, with the merged token ranges of eight queries
        output: page to write (default inspection.html in the run)
        record: new file for all selected blocks, which nsa bench attention --recorded reads
    """
    from nsa.files import replace_text
    from nsa.train.run_folder import RunFolder

    check_output("inspect", "--record", record, is_new=True)
    check_output("inspect", "--output", output)
    folder = RunFolder.open(run)
    config = folder.load_config()

    # PyTorch from here on: a mistyped path is answered without it.
    from nsa.train.execution.precision import choose_device
    from nsa.train.runs.inspection import inspect_run, inspection_page
    from nsa.train.watch.out_of_memory import check_fits, explained

    check_fits("inspect", config.model, choose_device(device), training=False)
    with explained("inspect", "the text", lambda: "Give fewer --tokens or --device cpu."):
        found = inspect_run(
            folder, checkpoint=checkpoint, text=text, device=device, num_tokens=tokens
        )
    target = output or folder.path / "inspection.html"
    replace_text(target, inspection_page(found))
    if record is not None:
        found.record(record)
    if json:
        print(dumps(found.json()))
        return 0
    for line in found.lines():
        print(line)
    print(f"page: {target}")
    return 0
