"""Builds the kernels of torchcram.runtime along with the package, where there is a compiler.

Without one the wheel has no kernels and fits every machine; TORCHCRAM_KERNELS=require makes that an
error, TORCHCRAM_KERNELS=none asks for it.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("src") / "torchcram"
NATIVE = PACKAGE / "kernels" / "cpu"


class KernelsBuildHook(BuildHookInterface):
    """Compiles into the source tree, which an editable install uses as well."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Adds the library to the wheel, and marks it as one for this platform."""
        wish = os.environ.get("TORCHCRAM_KERNELS", "")
        if self.target_name != "wheel" or wish == "none":
            return
        tools = runpy.run_path(str(Path(self.root) / PACKAGE / "runtime" / "build.py"))
        try:
            library: Path = tools["build"]()
        except (RuntimeError, OSError) as error:  # the latter of a folder that is read-only
            if wish == "require":
                raise
            self.app.display_warning(f"the wheel gets no kernels: {error}")
            return
        build_data["artifacts"].append(f"/{NATIVE.as_posix()}/{library.name}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tools['wheel_platform']()}"
