"""A plan on disk: reading the folder, checking its files, mapping its weights.

Writing is in ``plan_writer``; its names are offered here too, since whoever makes a plan folder
also reads one. ``docs/plan-format.md`` describes the folder for people.
"""

import glob
import hashlib
import mmap
import os
import re
import reprlib
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.errors import IncompatibleError, InputError, nearest
from runtime.plan import PLAN_FILE, SEAL_FILE, Artefact, ExecutionPlan, TensorRef, TensorType
from runtime.plan_checks import artefacts
from runtime.plan_document import MAX_DOCUMENT_BYTES, RECOMPILE, decode_plan
from runtime.plan_writer import PlanWriter, WeightsWriter, seal

__all__ = [
    "PlanWriter",
    "WeightsWriter",
    "check_artefact",
    "give_back_pages",
    "load_plan",
    "map_tensors",
    "read_plan",
]

_DTYPES = {TensorType.F32: np.dtype("<f4"), TensorType.U8: np.dtype("u1")}
_SEAL = re.compile(rb"[0-9a-f]{64}  " + re.escape(PLAN_FILE.encode()) + rb"\n")
_RESEAL = (
    f"{RECOMPILE}, or, to run it as it is, `sha256sum {PLAN_FILE} > {SEAL_FILE}` in the folder"
)
_COPY_ALL = f"copy the whole folder, or {RECOMPILE}"


def read_plan(path: str | os.PathLike[str]) -> ExecutionPlan:
    """The plan in the folder ``path``; its files are looked at, but not read.

    Raises:
        InputError: No plan there, a malformed or inconsistent one, or a file is missing or lies
            outside the folder.
        IncompatibleError: Another major version, a ``plan.json`` that was changed since, or a file
            that has another length than recorded.
    """
    folder = Path(path)
    _check_folder(folder)
    data = _read(folder, PLAN_FILE, MAX_DOCUMENT_BYTES)
    plan = decode_plan(data, folder / PLAN_FILE)
    _check_seal(folder, data)
    for _, artefact in artefacts(plan):
        _locate(folder, artefact)
    return plan


def load_plan(
    path: str | os.PathLike[str], verify_digests: bool = True
) -> tuple[Path, ExecutionPlan]:
    """The folder and its plan, every file checked against its digest unless told otherwise.

    Raises:
        InputError, IncompatibleError: As ``read_plan`` and ``check_artefact`` do.
    """
    folder = Path(path)
    plan = read_plan(folder)
    if verify_digests:
        for _, artefact in artefacts(plan):
            check_artefact(folder, artefact)
    return folder, plan


def check_artefact(folder: Path, artefact: Artefact) -> None:
    """Compare a file's length and SHA-256 with what the plan recorded; reads it piece by piece.

    Raises:
        InputError: The file is missing, unreadable or outside the folder.
        IncompatibleError: It is not the file that the plan was made with.
    """
    file = _locate(folder, artefact)
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(
            "cannot read a file of the plan", where=file, found=error.strerror
        ) from error
    if found != artefact.sha256:
        raise IncompatibleError(
            "not the file that the plan was made with",
            where=folder / artefact.path,
            found=f"SHA-256 {found[:12]}...",
            expected=f"{artefact.sha256[:12]}...",
            hint=_COPY_ALL,
        )


def map_tensors(
    folder: Path, weights: Artefact, tensors: Sequence[TensorRef]
) -> dict[str, NDArray[Any]]:
    """Every tensor by name: read-only views of one mapping of the weights file.

    Raises:
        InputError, IncompatibleError: The file is missing or has another length than recorded.
    """
    file = _locate(folder, weights)
    if not tensors:
        return {}
    try:
        data = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise InputError("cannot map the weights", where=file, found=error.strerror) from error
    views: dict[str, NDArray[Any]] = {}
    for tensor in tensors:
        piece = data[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        views[tensor.name] = piece.view(_DTYPES[tensor.type]).reshape(tensor.shape)
    return views


def give_back_pages(arrays: Iterable[NDArray[Any]]) -> None:
    """Let the system take back the pages of mapped ``arrays``; who looks again reads them again.

    Once ONNX Runtime has packed its constants, that leaves one copy of them in memory. Arrays that
    are not mapped from a file stay as they are.
    """
    mappings: dict[int, mmap.mmap] = {}
    for array in arrays:
        owner: Any = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if isinstance(owner, mmap.mmap):
            mappings[id(owner)] = owner
    for mapping in mappings.values():
        mapping.madvise(mmap.MADV_DONTNEED)


def _check_folder(folder: Path) -> None:
    # os.path rather than pathlib: it says False to names that no file can have
    if os.path.isdir(folder):
        if not os.path.lexists(folder / PLAN_FILE):
            hint = "name a folder that `plan compile` wrote"
            raise InputError("not a plan", where=folder, found=f"no {PLAN_FILE}", hint=hint)
    elif os.path.exists(folder):
        hint = "name the plan's folder, not a file in it"
        raise InputError("not a plan", where=folder, found="a file", expected="a folder", hint=hint)
    else:
        plans = glob.glob("*.plan", root_dir=folder.parent) if os.path.isdir(folder.parent) else []
        hint = nearest(folder.name, plans) if plans else "make one with `plan compile`"
        raise InputError("no such plan", where=folder, hint=hint)


def _read(folder: Path, relative: str, limit_bytes: int) -> bytes:
    """The start of a file: all of it, or one byte more than the limit."""
    file = _contained_file(folder, relative)
    try:
        with file.open("rb") as stream:
            # Rather than asking for the size beforehand: a file may grow meanwhile
            return stream.read(limit_bytes + 1)
    except OSError as error:
        raise InputError("cannot read the plan", where=file, found=error.strerror) from error


def _check_seal(folder: Path, document: bytes) -> None:
    expected = seal(document)
    found = _read(folder, SEAL_FILE, len(expected))
    if found != expected and not _SEAL.fullmatch(found):
        raise IncompatibleError(
            f"the seal of {PLAN_FILE} is damaged",
            where=folder / SEAL_FILE,
            found=reprlib.repr(found),
            expected=f"{expected[:12].decode()}..., two spaces, {PLAN_FILE} and a line break",
            hint=_RESEAL,
        )
    if found != expected:
        raise IncompatibleError(
            f"{PLAN_FILE} or its seal {SEAL_FILE} was changed after the plan was compiled",
            where=folder / PLAN_FILE,
            found=f"SHA-256 {expected[:12].decode()}...",
            expected=f"{found[:12].decode()}..., as {SEAL_FILE} says",
            hint=_RESEAL,
        )


def _locate(folder: Path, artefact: Artefact) -> Path:
    """The file of ``artefact``, with links resolved, once it is known to have the right length."""
    file = _contained_file(folder, artefact.path)
    length = file.stat().st_size
    if length != artefact.bytes:
        raise IncompatibleError(
            "file has another length than when the plan was made",
            where=folder / artefact.path,
            found=f"{length} bytes",
            expected=artefact.bytes,
            hint=_COPY_ALL,
        )
    return file


def _contained_file(folder: Path, relative: str) -> Path:
    """The regular file at ``relative``; a link may lead to another place inside the folder only."""
    file = folder / relative
    try:
        root = os.path.realpath(folder, strict=True)
        real = Path(os.path.realpath(file, strict=True))
        mode = real.stat().st_mode
    except OSError as error:
        raise InputError(
            "a file of the plan is missing", where=file, found=error.strerror, hint=_COPY_ALL
        ) from error
    if not real.is_relative_to(root):
        raise InputError(
            "a file of the plan lies outside it",
            where=file,
            found="a link that leads out",
            expected="a file inside the folder",
            hint=_COPY_ALL,
        )
    # Opening a named pipe would wait for ever
    if not stat.S_ISREG(mode):
        raise InputError("not a file", where=file, expected="a regular file", hint=_COPY_ALL)
    return real
