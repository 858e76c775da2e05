"""Every CUDA kernel of the package, found by its file: `<op>.cu` and the KERNELS of `<op>.py`."""

from importlib import import_module, resources

from ...layouts.errors import KernelBuildError
from ..device.kernel_source import KernelSource


def all_kernels() -> tuple[KernelSource, ...]:
    """The kernels of every `.cu` file here, by file name. Needs no GPU and compiles nothing.

    Raises KernelBuildError where a `.cu` file is named by no launcher, so none is forgotten.
    """
    package = __name__.removesuffix(".registry")
    names = sorted(entry.name for entry in resources.files(package).iterdir())
    files = [name for name in names if name.endswith(".cu")]
    kernels: list[KernelSource] = []
    for file in files:
        stem = file.removesuffix(".cu")
        if f"{stem}.py" not in names:
            raise KernelBuildError(f"{file} has no launcher {stem}.py with its KERNELS")
        found = import_module(f"{package}.{stem}").KERNELS
        if file not in {kernel.file_name for kernel in found}:
            raise KernelBuildError(f"{stem}.py: KERNELS holds no kernel of {file}")
        kernels += found
    return tuple(kernels)
