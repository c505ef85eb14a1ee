"""Puts the compiled CPU kernels into wheels and editable installations.

Without a C++20 compiler, or on another system than Linux on x86-64, the wheel is pure Python.
"""

import importlib.util
import platform
import sys
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The compiled libraries need glibc 2.27; tests/test_build.py reads it from their symbols.
TAG = "py3-none-manylinux_2_27_x86_64"


class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return
        path = Path(self.root, "multimax_fairseq", "ops", "build.py")
        spec = importlib.util.spec_from_file_location("build", path)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            build.build_libraries()
        except Exception as error:
            self.app.display_warning(f"this installation compiles its CPU kernels later: {error}")
            return
        if version == "standard":
            build_data.update(pure_python=False, tag=TAG)
