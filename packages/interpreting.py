"""Makes Triton's interpreter faster for tests. Most of its time went into checks whose results it drops, and into objects that it
makes again for each operation. The replaced functions are private, so the changes apply only to releases that they were read from.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

RELEASE = "3.9."  # of Triton; with other releases, the interpreter is slower


def patch_language_once() -> None:
    """Under TRITON_INTERPRET=1, replaces functions of Triton's interpreter by faster ones with the same results."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton import __version__

    _patch_calls_of_device_functions()
    if not __version__.startswith(RELEASE):
        return
    _skip_dropped_overflow_checks()
    _remember_dtypes()
    _remember_shapes()
    _unwrap_plain_values_first()


def _patch_calls_of_device_functions() -> None:
    """A call of a device function patches no module that is patched already.

    A launch replaces the builtins of ``triton.language`` by functions that interpret. Triton repeats this at every call of a device
    function.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.__call__
    modules: dict[Any, list[Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in modules:
            found = list(self.fn.__globals__.values())
            modules[self.fn] = [module for module in (tl, tl.core) if any(value is module for value in found)]
        if any(tl.core.is_builtin(module.load) for module in modules[self.fn]):
            return original(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call


def _skip_dropped_overflow_checks() -> None:
    """Each integer operation was computed again in int64 and compared with the limits, for an assertion that only the option
    ``debug`` evaluates."""
    from triton.language.semantic import TritonSemantic

    original = TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            original(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def _remember_dtypes() -> None:
    """NumPy's dtype of a Triton type came from a table that was built again for each lookup."""
    from triton.runtime import interpreter

    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name
        if name not in known:
            known[name] = original(tt_dtype)
        return known[name]

    interpreter._get_np_dtype = np_dtype


def _remember_shapes() -> None:
    """Tensors and block types of equal shapes share the objects that describe the shape. Nothing changes these objects."""
    from triton.language import core

    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    tensors: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([core._unwrap_if_constexpr(size) for size in shape])
        if sizes in blocks:
            self.element_ty = element_ty
            self.shape, self.numel = blocks[sizes]
            self.name = f"<{self.shape}, {element_ty}>"
        else:
            block_init(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes in tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = tensors[sizes]
        else:
            tensor_init(self, handle, type)
            tensors[sizes] = self.numel, self.shape

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _unwrap_plain_values_first() -> None:
    """Most values that may be constexpr are of a few types, which need no tests for subclasses of lists and tuples."""
    from triton.language import core

    original = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.pointer_type, core.block_type, core.tensor}

    def unwrap(value: Any) -> Any:
        if type(value) in plain:
            return value
        return value.value if type(value) is core.constexpr else original(value)

    core._unwrap_if_constexpr = unwrap
