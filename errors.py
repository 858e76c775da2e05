"""Public exceptions. They are defined in `layouts.errors`, below everything that raises them."""

from .layouts.errors import (
    ActivationError,
    ArgumentError,
    BackendError,
    BatchError,
    ConfigError,
    DeviceMemoryError,
    KernelBuildError,
    LayoutError,
    PlanError,
    ReportError,
    RequestError,
    RingslabError,
    StoreError,
    TraceError,
)

__all__ = [
    "ActivationError",
    "ArgumentError",
    "BackendError",
    "BatchError",
    "ConfigError",
    "DeviceMemoryError",
    "KernelBuildError",
    "LayoutError",
    "PlanError",
    "ReportError",
    "RequestError",
    "RingslabError",
    "StoreError",
    "TraceError",
]
