"""Every CUDA kernel of the package, found by its file: KERNELS of `<op>.py` beside `<op>.cu`."""

from importlib import import_module, resources

from ..device.kernel_source import KernelSource


def find_kernels() -> tuple[tuple[KernelSource, ...], list[str]]:
    """The kernels of every launcher beside a `.cu` file, by file name, and the `.cu` files that no
    launcher has in its KERNELS (there should be none). Needs no GPU and compiles nothing."""
    package = __name__.removesuffix(".registry")
    names = sorted(entry.name for entry in resources.files(package).iterdir())
    files = [name for name in names if name.endswith(".cu")]
    kernels: list[KernelSource] = []
    for file in files:
        stem = file.removesuffix(".cu")
        if f"{stem}.py" in names:
            kernels += import_module(f"{package}.{stem}").KERNELS
    known = {kernel.file_name for kernel in kernels}
    return tuple(kernels), [file for file in files if file not in known]
