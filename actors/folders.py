"""Where jobs write, by folder: for the roster, which refuses an output that lies in another job's. No Ray, no torch."""

import os
from pathlib import Path


class Folders:
    """Outputs of jobs, of which none may hold another."""

    def __init__(self) -> None:
        self._jobs: dict[Path, str] = {}
        self._holders: dict[Path, str] = {}
        """Folders that hold an output, and one job whose it is."""

    def add(self, name: str, output: str) -> None:
        path = Path(os.path.normpath(output))
        self._jobs[path] = name
        for holder in path.parents:
            self._holders.setdefault(holder, name)

    def clash(self, name: str, output: str) -> str | None:
        """The other job whose output is, holds or lies in this one."""
        path = Path(os.path.normpath(output))
        found = (self._holders.get(path), *(self._jobs.get(folder) for folder in (path, *path.parents)))
        return next((other for other in found if other not in (None, name)), None)


def outside(root: Path, output: Path) -> str:
    """Why a job or sweep may not write there; empty: it may. `root`: the cluster's folder of outputs."""
    top, path = (Path(os.path.realpath(each.expanduser())) for each in (root, output))
    if top in path.parents and top / "_tlora" not in (path, *path.parents):
        return ""
    return f"output {output} lies outside of the folder of this cluster's outputs, {root}."
