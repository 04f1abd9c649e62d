"""Fixtures that several test modules share."""

from collections.abc import Callable
from pathlib import Path

import pytest
from compiled_models import Recipe, compile_recipe


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
