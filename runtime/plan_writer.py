"""Making a plan's folder: all in a temporary one beside the target, then renamed onto it."""

import errno
import hashlib
import itertools
import os
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from profiles.errors import FulcrumError, InputError
from runtime.plan import (
    ALIGNMENT_BYTES,
    DRAFT_FOLDER,
    PLAN_FILE,
    SEAL_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Artefact,
    ExecutionPlan,
    GraphKind,
    TensorRef,
    TensorType,
)
from runtime.plan_checks import artefacts, is_safe_path
from runtime.plan_document import MAX_DOCUMENT_BYTES, encode_plan, is_plan_document

_GRAPHS = {f"{kind}.onnx" for kind in GraphKind}
_FOLDERS = {"npu", "mlir", DRAFT_FOLDER}
_ENTRIES = frozenset({PLAN_FILE, SEAL_FILE, WEIGHTS_FILE, TOKENIZER_FILE} | _FOLDERS | _GRAPHS)
_DRAFT_ENTRIES = frozenset(
    {WEIGHTS_FILE, *(f"{kind}.onnx" for kind in (GraphKind.LAYERS, GraphKind.HEAD))}
)
_TYPES = {np.dtype("<f4"): TensorType.F32, np.dtype("u1"): TensorType.U8}
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


class PlanWriter:
    """A plan folder in the making; leaving the ``with`` block without ``commit`` leaves nothing.

    ::

        with PlanWriter("phi.plan") as writer:
            with writer.weights() as weights:
                tensors = [weights.add(name, array) for name, array in ...]
            emit_graph(writer.path("layers.onnx"))
            ...
            writer.commit(plan)

    An earlier plan at the target stays as it is until ``commit`` replaces it; anything else there
    is refused. What killed writers left beside the target is cleared away.

    Raises:
        InputError: The target is taken by something else, or its place cannot be written.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self._asked = Path(target)
        self._target = self._asked
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        try:
            # Through links, so that the plan behind one is replaced and the link stays
            self._target = Path(os.path.realpath(self._asked))
            check_outside_plans(self._target)
            _clear_leftovers(self._target)
            _check_replaceable(self._target)
            self._make_partial()
        except (OSError, ValueError) as error:
            raise _write_error(self._asked, error) from error
        except BaseException:
            self._discard()
            raise
        return self

    def _make_partial(self) -> None:
        """A fresh folder beside the target, named after it, this process and a serial number."""
        name = f".{self._target.name}.partial-{os.getpid()}"
        while True:
            # Noted before it is made, so that an interrupt right after finds it
            self._folder = self._target.with_name(f"{name}-{next(_serial)}")
            try:
                self._folder.mkdir()
            except FileExistsError:
                # Of a killed process that had this process's number
                continue
            return

    def _discard(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()
        # Whoever writes into the folder need not know how to say that the disk is full
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise _write_error(self._asked, error) from error

    @property
    def folder(self) -> Path:
        """The temporary folder; its files move to the target with ``commit``."""
        if self._folder is None:
            raise FulcrumError("the plan is written already, or was never begun", where=self._asked)
        return self._folder

    def path(self, relative: str) -> Path:
        """Where to write the file ``relative`` of the plan; its folder is made."""
        first, _, rest = relative.partition("/")
        foreign = first not in _ENTRIES or (first == DRAFT_FOLDER and rest not in _DRAFT_ENTRIES)
        if not is_safe_path(relative) or foreign:
            expected = "one of, or a file in one of: " + ", ".join(sorted(_ENTRIES))
            raise FulcrumError("not a place in a plan", found=repr(relative), expected=expected)
        file = self.folder / relative
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _write_error(self._asked, error) from error
        return file

    def write(self, relative: str, data: bytes) -> Artefact:
        """Write a small file whole."""
        file = self.path(relative)
        try:
            file.write_bytes(data)
        except OSError as error:
            raise _write_error(self._asked, error) from error
        return Artefact(relative, len(data), hashlib.sha256(data).hexdigest())

    def discard(self, relative: str) -> None:
        """Remove a folder of the plan again, with all that is in it."""
        shutil.rmtree(self.folder / relative)

    def weights(self, relative: str = WEIGHTS_FILE) -> "WeightsWriter":
        """The writer of ``weights.bin``, or the draft's; use it as a context manager."""
        return WeightsWriter(self.path(relative), relative)

    def artefact(self, relative: str) -> Artefact:
        """The entry of a file that lies in the folder; reads it for its digest."""
        file = self.path(relative)
        try:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                return Artefact(relative, stream.tell(), digest)
        except OSError as error:
            raise _write_error(self._asked, error) from error

    def commit(self, plan: ExecutionPlan) -> Path:
        """Write ``plan.json`` and its seal, force all to the disk, put the folder at the target.

        Returns the target.

        Raises:
            FulcrumError: The plan is inconsistent, or does not list exactly the files written.
            InputError: The target cannot be written or is taken by something else by now.
        """
        folder = self.folder
        data = encode_plan(plan)
        _check_complete(folder, plan)
        try:
            (folder / PLAN_FILE).write_bytes(data)
            (folder / SEAL_FILE).write_bytes(seal(data))
            for entry in (*folder.rglob("*"), folder):
                _sync(entry)
            _check_replaceable(self._target)
            _put_in_place(folder, self._target)
            _sync(self._target.parent)
        except OSError as error:
            raise _write_error(self._asked, error) from error
        self._folder = None
        return self._target


class WeightsWriter:
    """Appends tensors to a weights file, each at a multiple of 4096 bytes, zeros in between.

    The file ends on such a multiple too, so that direct reads never pass its end. One tensor is
    in memory at a time, and the digest is computed on the way.
    """

    def __init__(self, file: Path, relative: str = WEIGHTS_FILE) -> None:
        self._file, self._relative = file, relative
        self._bytes = 0
        self._digest = hashlib.sha256()
        try:
            self._stream = file.open("wb")
        except OSError as error:
            raise _write_error(file, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, array: NDArray[Any]) -> TensorRef:
        """Write ``array`` (float32 or uint8, not empty) behind the tensors before it."""
        kind = _TYPES.get(array.dtype)
        if kind is None or array.size == 0:
            found = f"{array.dtype} of shape {array.shape}"
            expected = "float32 or uint8, not empty"
            raise FulcrumError("cannot store tensor", where=name, found=found, expected=expected)
        tensor = TensorRef(name, kind, array.shape, self._bytes)
        try:
            self._append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self._append(memoryview(bytes(-self._bytes % ALIGNMENT_BYTES)))
        except OSError as error:
            raise _write_error(self._file, error) from error
        return tensor

    def close(self) -> None:
        """Hand everything to the operating system; further calls do nothing."""
        try:
            self._stream.close()
        except OSError as error:
            raise _write_error(self._file, error) from error

    def artefact(self) -> Artefact:
        """The entry of the weights file as written so far."""
        return Artefact(self._relative, self._bytes, self._digest.hexdigest())

    def _append(self, data: memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self._bytes += len(data)


def check_outside_plans(path: str | os.PathLike[str]) -> None:
    """Refuse to write ``path`` if it lies in a plan: a file of that plan might be replaced.

    Raises:
        InputError: A folder above ``path`` is a plan's.
    """
    for folder in Path(os.path.realpath(path)).parents:
        if os.path.isfile(folder / PLAN_FILE) and os.path.isfile(folder / SEAL_FILE):
            raise InputError(
                "will not write into a plan",
                where=path,
                found=f"the plan {folder}",
                hint="name another place with -o",
            )


def seal(document: bytes) -> bytes:
    """What ``plan.sha256`` holds beside this ``plan.json``: the output of ``sha256sum``."""
    return f"{hashlib.sha256(document).hexdigest()}  {PLAN_FILE}\n".encode()


def _check_replaceable(target: Path) -> None:
    """Refuse a target that holds anything but a plan: what is there would be deleted."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        found = "a file"
    else:
        foreign = sorted({entry.name for entry in target.iterdir()} - _ENTRIES)
        if (target / DRAFT_FOLDER).is_dir():
            found = {entry.name for entry in (target / DRAFT_FOLDER).iterdir()}
            foreign += [f"{DRAFT_FOLDER}/{name}" for name in sorted(found - _DRAFT_ENTRIES)]
        document = target / PLAN_FILE
        if foreign:
            found = f"a folder with {foreign[0]!r}, which no plan has"
        elif not document.is_file() or document.stat().st_size > MAX_DOCUMENT_BYTES:
            found = f"a folder without a {PLAN_FILE} to replace"
        elif not is_plan_document(document.read_bytes()):
            found = f"a folder whose {PLAN_FILE} is not a plan's"
        else:
            return
    raise InputError(
        "will not replace what is not a plan",
        where=target,
        found=found,
        expected="a plan, or nothing",
        hint="name another place with -o, or remove it yourself",
    )


def _check_complete(folder: Path, plan: ExecutionPlan) -> None:
    written = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in folder.rglob("*")
        if not file.is_dir()
    }
    listed = {artefact.path: artefact.bytes for _, artefact in artefacts(plan)}
    if written != listed:
        differing = sorted(dict(written.items() ^ listed.items()))[0]
        raise FulcrumError(
            "the plan does not list the files that were written",
            where=differing,
            found=f"{written.get(differing, 'no')} bytes",
            expected=f"{listed.get(differing, 'no')} bytes",
            hint="this is a bug in the compiler",
        )


_serial = itertools.count()


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename ``folder`` to ``target``; an earlier plan there comes back if that fails."""
    old = folder.with_name(folder.name.replace(".partial-", ".old-"))
    try:
        if target.exists():
            target.rename(old)
        folder.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(target: Path) -> None:
    """Remove what writers of ``target`` left that no longer run; bring back a plan they moved."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-([1-9][0-9]{{0,6}})-[0-9]+")
    for entry in sorted(target.parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match is None or _is_running(int(match[2])):
            continue
        if match[1] == "old" and not target.exists():
            entry.rename(target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # It runs and belongs to another user
        return True
    return True


def _sync(entry: Path) -> None:
    descriptor = os.open(entry, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot do this for a folder
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _write_error(target: Path, error: OSError | ValueError) -> InputError:
    found = error.strerror if isinstance(error, OSError) else error
    hint = "free some space or name another place with -o"
    return InputError("cannot write the plan", where=target, found=found, hint=hint)
