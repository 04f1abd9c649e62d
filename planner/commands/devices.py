"""``plan devices`` and ``plan profile``: what is known of each device, and how well."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from planner.inspect.text import columns
from planner.inspect.units import bytes_label, clean
from planner.terminal import Terminal, write_file
from profiles.errors import InputError, nearest
from profiles.profile import (
    DeviceProfile,
    load_profile,
    provenance_counts,
    save_profile,
    shipped_profiles,
)

HOST = "host"


def known_devices() -> list[str]:
    """Names that ``--device`` takes, profile files apart."""
    return [*shipped_profiles(), HOST]


def check_device(name: str) -> None:
    """``InputError`` unless ``name`` is ``host``, a shipped profile or a readable profile file."""
    known = known_devices()
    if name in known:
        return
    path = Path(name)
    if path.name == name and path.suffix != ".toml" and not path.exists():
        raise InputError("unknown device", found=repr(name), hint=nearest(name, known))
    load_profile(name)


def list_devices(terminal: Terminal, as_json: bool) -> None:
    """Every shipped profile, and this machine if it was measured."""
    profiles = [load_profile(name) for name in shipped_profiles()]
    if (host := measured_host()) is not None:
        profiles.append(host)
    if as_json:
        terminal.result_json({"devices": [device_data(profile) for profile in profiles]})
        return
    header = ("device", "chip", "processors", "flash", "measured", "paper", "derived", "assumed")
    rows = [header, *(_row(profile) for profile in profiles)]
    text = "\n".join(columns(rows, left=3, indent=0, room=terminal.width()))
    if host is None:
        text += "\n\nhost: not measured yet; `plan profile host` does it, or the first compile"
    terminal.result(text + "\n\nThe last four columns count numbers by where they come from.")


def measured_host() -> DeviceProfile | None:
    """The profile that was measured on this machine before; None when there is none."""
    from planner.host_profile import cached_host_profile

    return cached_host_profile()


def device_data(profile: DeviceProfile) -> dict[str, object]:
    """A device as ``plan devices --json`` shows it."""
    return {
        "name": profile.name,
        "description": profile.description,
        "soc": profile.soc,
        "os": profile.os,
        "processors": [
            {"id": p.id, "kind": p.kind.value, "threads": p.threads} for p in profile.processors
        ],
        "flash_bytes_per_s": flash_rate(profile),
        "memory_bytes": profile.memory.total_bytes.value,
        "default_budget_bytes": profile.memory.default_budget_bytes.value,
        "numbers": {source.value: n for source, n in provenance_counts(profile).items()},
    }


def flash_rate(profile: DeviceProfile) -> float:
    """Bytes a second of the fastest way to read the storage."""
    return max(read.bytes_per_s.value for read in profile.storage.reads)


def _row(profile: DeviceProfile) -> Sequence[str]:
    processors = ", ".join(
        f"{p.id} ({p.threads} threads)" if p.threads > 1 else p.id for p in profile.processors
    )
    flash = f"{bytes_label(round(flash_rate(profile)))}/s"
    counts = (str(count) for count in provenance_counts(profile).values())
    return (profile.name, clean(profile.soc, 36), clean(processors, 40), flash, *counts)


def show_profile(
    terminal: Terminal,
    device: str,
    output: Path | None,
    refresh: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Print or write a profile; ``host`` is measured if it was not before."""
    check_device(device)
    if device == HOST:
        profile = _measure(terminal, refresh, threads)
    elif refresh or threads is not None:
        what = "only this machine can be measured"
        raise InputError(what, found=device, expected=HOST, hint="drop --refresh and --threads")
    else:
        profile = load_profile(device)
    if output is not None:
        write_file(output, profile_text(profile))
    if as_json:
        terminal.result_json(msgspec.to_builtins(profile))
    elif output is not None:
        terminal.result(f"wrote {output}: {summary(profile)}")
    else:
        terminal.result(profile_text(profile))


def _measure(terminal: Terminal, refresh: bool, threads: int | None) -> DeviceProfile:
    # Late: it loads what it measures
    from planner.host_profile import host_profile

    def progress(done: int, total: int) -> None:
        terminal.report("measuring this machine", done, total)

    return host_profile(refresh=refresh, progress=progress, threads=threads)


def profile_text(profile: DeviceProfile) -> str:
    """The profile as TOML."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.toml"
        save_profile(profile, file)
        return file.read_text(encoding="utf-8")


def summary(profile: DeviceProfile) -> str:
    """How many numbers a profile has, by source."""
    counts = provenance_counts(profile)
    return ", ".join(f"{n} {source.value}" for source, n in counts.items() if n) + " numbers"
