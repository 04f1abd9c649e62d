"""Fixtures that several test modules share."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compiled_models import Recipe, compile_recipe
from hypothesis import settings

from runtime.session import Session

# Timings never decide a test
settings.register_profile("fulcrum", deadline=None)
settings.load_profile("fulcrum")


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> None:
    """SIGINT is a KeyboardInterrupt also where a shell started the tests in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Path]:
    """The plan folder of a recipe, compiled once; not to be changed."""
    root = tmp_path_factory.mktemp("compiled")
    folders: dict[Recipe, Path] = {}

    def folder_of(recipe: Recipe) -> Path:
        if recipe not in folders:
            folder = root / f"{len(folders)}.plan"
            compile_recipe(recipe, folder)
            folders[recipe] = folder
        return folders[recipe]

    return folder_of


@pytest.fixture(scope="session")
def opened(compiled: Callable[[Recipe], Path]) -> Iterator[Callable[..., Session]]:
    """The session of a recipe, opened once; options as for ``load``."""
    sessions: dict[object, Session] = {}

    def session_of(what: Recipe, **options: Any) -> Session:
        key = what, tuple(options.items())
        if key not in sessions:
            sessions[key] = Session(compiled(what), **options)
        return sessions[key]

    yield session_of
    for session in sessions.values():
        session.close()
