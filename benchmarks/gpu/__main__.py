"""One GPU, one command, ten minutes: ``python -m benchmarks.gpu FOLDER`` writes ``gpu.json`` and ``gpu.md`` there.

First what the device can do at most (ceilings.py), then what must hold (laws.py), each choice of a kernel against its
alternatives (kernels.py), then whole GRPO steps of Qwen3-shaped models with random weights (step.py): 32 prompts of 128
tokens, 8 answers of 1,024 tokens to each; then updates of the largest with larger micro-batches. Needs torch,
transformers and peft, no network and no tokenizer; from a checkout: ``PYTHONPATH=src``. Each part is a process of its
own with a time limit, and both files are written anew whenever a part says something, so whatever happens there is a
result. ``--quick --device cpu`` runs all of it small.
"""

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARK = "RESULT "
MODELS = ("0.6b", "1.7b", "8b")
QUICK_MODELS = ("small", "small-lora")
SECONDS = {
    "ceilings": 60.0,
    "laws": 120.0,
    "kernels": 90.0,
    "0.6b": 120.0,
    "1.7b": 140.0,
    "8b": 200.0,
    "budgets": 120.0,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every part and write the report; the exit code is 1 when a law does not hold or a part gave nothing."""
    given = _parser().parse_args(arguments)
    given.models = given.models or ",".join(QUICK_MODELS if given.quick else MODELS)
    if given.part:
        return _run_part(given)
    given.folder.mkdir(parents=True, exist_ok=True)
    began, report = time.monotonic(), _heading(given)
    for part in ("ceilings", "laws", "kernels", *given.models.split(","), "budgets"):
        left = given.limit - (time.monotonic() - began)
        limit = min(left, SECONDS.get(part, 120.0))
        if limit < 5:
            report["parts"][part] = {"error": "no time was left"}
        else:
            _watch(part, limit, given, report)
        _write(report, given.folder)
    _say(f"written: {given.folder / 'gpu.json'}, {given.folder / 'gpu.md'} ({time.monotonic() - began:.0f} s)")
    parts = report["parts"].values()
    is_whole = all("error" not in part for part in parts)
    return 0 if is_whole and all(law["holds"] for law in report["parts"]["laws"].values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="where gpu.json and gpu.md are written")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}, separated by commas (default: all)")
    parser.add_argument("--limit", type=float, default=570.0, metavar="SECONDS", help="for everything (default: 570)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser


def _heading(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.gpu.ceilings import Work  # noqa: F401, a wrong path fails here and not in ten minutes
    from gnomon.models.device import describe_device, resolve_device

    has_trl = importlib.util.find_spec("trl") is not None
    return {
        "device": describe_device(resolve_device(given.device)),
        "versions": {name: _version(name) for name in ("torch", "transformers", "peft")} | {"python": sys.version},
        "platform": platform.platform(terse=True),
        "trl": "installed, not measured here: it wants a tokenizer" if has_trl else "not installed",
        "quick": given.quick,
        "parts": {},
    }


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _watch(part: str, limit: float, given: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run one part in a process, and keep each result as it comes."""
    found: dict[str, Any] = {}
    report["parts"][part] = found
    began = time.monotonic()
    command = [sys.executable, "-u", "-m", "benchmarks.gpu", str(given.folder), "--device", given.device]
    command += ["--part", part] + ["--quick"] * given.quick
    _say(f"[{part}] at most {limit:.0f} s")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        timer = threading.Timer(limit, running.kill)
        timer.start()
        assert running.stdout is not None, "it is a pipe"
        said: list[str] = []
        for line in running.stdout:
            if not line.startswith(MARK):
                said.append(line)
                continue
            name, result = json.loads(line.removeprefix(MARK))
            found[name] = result
            _say(f"[{part}] {time.monotonic() - began:6.1f} s  {name}: {json.dumps(result)}")
            _write(report, given.folder)
        timer.cancel()
    if running.returncode:
        is_late = time.monotonic() - began >= limit
        found["error"] = f"stopped after {limit:.0f} s" if is_late else "".join(said)[-3000:]
        _say(f"[{part}] {found['error']}")


def _run_part(given: argparse.Namespace) -> int:
    """Compute one part in this process; each result is a line on standard output."""

    from benchmarks.gpu.ceilings import Work, measure
    from benchmarks.gpu.kernels import compare
    from benchmarks.gpu.laws import laws
    from benchmarks.gpu.step import compare_budgets, run_model
    from gnomon.models.device import resolve_device

    device = resolve_device(given.device)

    def say(name: str, result: dict[str, Any]) -> None:
        print(MARK + json.dumps([name, result]), flush=True)

    if given.part == "ceilings":
        say("measured", measure(device, given.quick))
    elif given.part == "laws":
        for name, law in laws(device).items():
            try:
                say(name, law())
            except Exception as error:
                say(name, {"holds": False, "error": f"{type(error).__name__}: {error}"[:1000]})
    elif given.part == "kernels":
        for name, row in compare(device, _precision(device), given.quick):
            say(name, row)
    elif given.part == "budgets":
        name, work = ("small-lora", Work(3, 2, 7, 12)) if given.quick else ("8b", Work(16, 8, 128, 256))
        compare_budgets(name, work, device, _precision(device), say)
    else:
        work = Work(3, 2, 7, 12) if given.quick else Work(32, 8, 128, 1024)
        say("work", asdict(work))
        run_model(given.part, work, device, _precision(device), say)
    return 0


def _precision(device: Any) -> Any:
    import torch

    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _write(report: dict[str, Any], folder: Path) -> None:
    from benchmarks.gpu.table import markdown

    (folder / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(markdown(report), encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
