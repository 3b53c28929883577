"""The report as a Markdown page."""

from collections.abc import Iterator, Mapping
from typing import Any

GIB = 2**30


def markdown(report: Mapping[str, Any]) -> str:
    """Return device, laws, ceilings, and a row for each model and step, as far as they are known."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version.split()[0]}" for name, version in report["versions"].items())
    yield "# One GPU"
    yield ""
    yield f"{report['device']}; {versions}; {report['platform']}. TRL: {report['trl']}."
    parts = report["parts"]
    limits = parts.get("ceilings", {}).get("measured")
    if limits:
        nominal = limits["nominal_bf16_flops"]
        stated = f" (nominal {nominal / 1e12:.0f})" if nominal else ""
        yield (
            f"Measured at most: {limits['bfloat16_flops'] / 1e12:.4g} TFLOP/s in bf16{stated}, "
            f"{limits['float32_flops'] / 1e12:.4g} in float32, {limits['bytes_per_second'] / 1e12:.3g} TB/s copied, "
            "reads and writes counted."
        )
    yield ""
    yield "| law | holds | measured |"
    yield "|---|---|---|"
    for name, found in parts.get("laws", {}).items():
        if name == "error":
            yield f"| (stopped) | no | {_one_line(found)} |"
            continue
        rest = ", ".join(f"{key} {_short(value)}" for key, value in found.items() if key != "holds")[:300]
        yield f"| {name} | {'yes' if found['holds'] else '**no**'} | {rest} |"
    yield ""
    yield from _choices({**parts.get("kernels", {}), **parts.get("budgets", {})}, limits)
    yield (
        "| model | step | whole s | generate s | tokens/s | of the memory's speed | score s | update s | "
        "MFU (measured) | MFU (nominal) | peak GiB | engine to learner |"
    )
    yield "|" + "---|" * 12
    for name, part in parts.items():
        if name not in ("laws", "ceilings", "kernels", "budgets"):
            yield from _rows(name, part, limits)
    yield ""
    yield (
        "MFU: operations that the update needs (each prompt once, causal pairs, nothing recomputed) a second, beside "
        "the ceiling. Of the memory's speed: seconds that reading weights, keys and values must take, beside those of "
        "generating. Engine to learner: mean and largest difference of log-probabilities."
    )


def _choices(part: Mapping[str, Any], limits: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a row for each kernel; the fastest of its kind is bold."""
    kinds = {name: name.partition(": ")[0] for name in part if name != "error"}
    timed = sorted((name for name in kinds if "seconds" in part[name]), key=lambda name: -float(part[name]["seconds"]))
    fastest = {kinds[name]: name for name in timed}
    yield "| kernel, forward and backward | ms | of the measured ceiling | peak GiB |"
    yield "|---|---|---|---|"
    for name in kinds:
        row = part[name]
        if "left out" in row:
            yield f"| {name} | {_one_line(row['left out'])} | | |"
            continue
        rate = row.get("needed_flops", 0) / row["seconds"]
        share = _share(rate, limits and limits["bfloat16_flops"])
        said = f"**{name}**" if fastest[kinds[name]] == name else name
        yield f"| {said} | {1000 * row['seconds']:.3g} | {share} | {row['peak_bytes'] / GIB:.2f} |"
    yield ""


def _rows(name: str, part: Mapping[str, Any], limits: Mapping[str, Any] | None) -> Iterator[str]:
    bounds = part.get("bounds", {})
    for kind in ("cold", "warm"):
        found = {each: part.get(f"{kind} {each}", {}) for each in ("step", "generate", "score", "update")}
        seconds = {each: values.get("seconds") for each, values in found.items()}
        if seconds["generate"] is None:
            continue
        peak = max(values.get("peak_bytes", 0) for values in found.values()) / GIB
        memory = limits and bounds["decode_bytes"] / limits["bytes_per_second"]
        rate = seconds["update"] and bounds["update_flops"] / seconds["update"]
        gaps = found["score"]
        cells = (
            name,
            kind,
            _number(seconds["step"]),
            _number(seconds["generate"]),
            f"{bounds['tokens'] / seconds['generate']:,.0f}",
            _share(memory, seconds["generate"]),
            _number(seconds["score"]),
            _number(seconds["update"]),
            _share(rate, limits and limits[f"{bounds['dtype']}_flops"]),
            _share(rate, limits and limits["nominal_bf16_flops"]),
            f"{peak:.1f}",
            f"{gaps['gap_mean']:.1e}, {gaps['gap_max']:.1e}" if gaps else "",
        )
        yield f"| {' | '.join(cells)} |"
    few = part.get("warm decode of 8")
    if few and limits:
        share = _share(few["decode_bytes"] / limits["bytes_per_second"], few["seconds"])
        cells = (name, "8 rows", "", _number(few["seconds"]), f"{few['tokens'] / few['seconds']:,.0f}", share)
        yield f"| {' | '.join(cells)} |" + " |" * 6
    if "error" in part:
        yield f"| {name} | stopped | {_one_line(part['error'])} |" + " |" * 9


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _share(part: float | None, whole: float | None) -> str:
    return "" if not part or not whole else f"{part / whole:.0%}"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_short(each)}" for key, each in value.items()) + ")"
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.strip().splitlines()[-1:])[:200].replace("|", "/")
