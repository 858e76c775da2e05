"""Exceptions that a caller can meet, all under one base; public as `ringslab.errors`."""


class RingslabError(Exception):
    """Base of every exception that ringslab raises for a caller's mistake or a missing resource."""


class ConfigError(RingslabError, ValueError):
    """A YAML file is wrong. The message names file, line, key, value and the fix."""


class LayoutError(RingslabError, ValueError):
    """A record format, ring or slot layout does not add up, or a view of it is impossible."""


class ArgumentError(RingslabError, ValueError):
    """An argument has the wrong shape, dtype, stride, device or value."""


class PlanError(ArgumentError):
    """The sequences given to a plan contradict each other (lengths, positions, valid start)."""


class RequestError(RingslabError, ValueError):
    """A request was refused at submit, or a call names a request that is not there."""


class BatchError(RingslabError, RuntimeError):
    """`next_batch`, `attend` and `commit` were called out of order or with a foreign batch."""


class TraceError(RingslabError, ValueError):
    """A request trace is truncated, malformed or empty. The message names file and line."""


class ActivationError(RingslabError, ValueError):
    """An activation source lacks what is asked of it, or holds non-finite values."""


class ReportError(RingslabError, OSError):
    """What was asked for was done, but a file of it could not be written.

    `report` holds all that the file would have, `paths` names the files that are missing.
    """

    def __init__(self, message: str, report: dict, paths: tuple = ()):
        super().__init__(message)
        self.report = report
        self.paths = paths


class BackendError(RingslabError, RuntimeError):
    """The backend that was asked for cannot run on this machine."""


class KernelBuildError(RingslabError, RuntimeError):
    """A CUDA kernel did not compile. The message holds the options and the compiler's log."""


class DeviceMemoryError(RingslabError, MemoryError):
    """The slab or a workspace is larger than the memory that is free."""


class StoreError(RingslabError, RuntimeError):
    """An external store cannot be opened (no client, no permission, damaged), or is closed."""
