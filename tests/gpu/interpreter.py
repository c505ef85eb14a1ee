"""Fixes Triton's interpreter, and makes it faster, on import."""

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from multimax_fairseq.ops import backend
from multimax_fairseq.ops.checks import DTYPES

# The interpreter multiplies bfloat16 as if it were integers, and truncates where GPUs round.
plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def to_float32(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def create_dot(self, a, b, *rest):
    return plain_dot(self, to_float32(a), to_float32(b), *rest)


def cast_impl(self, source, destination):
    if (source.dtype.scalar, destination.scalar) != (tl.float32, tl.bfloat16):
        return plain_cast(self, source, destination)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)


InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
backend.INTERPRETED = DTYPES

# The interpreter patches the language again at each call of a function within a kernel, which takes
# most of its time.
prepared = set()


def call(self, *args, **kwargs):
    if id(self.fn.__globals__) not in prepared:
        prepared.add(id(self.fn.__globals__))
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = call


# The rest changes no result and halves the time: it caches the language's types, of which each
# operation makes several, and skips broadcasting between equal shapes.
blocks, shapes, numpy_types = {}, {}, {}
make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
equal, broadcast = tl.dtype.__eq__, TritonSemantic.broadcast_impl_value
plain_type = interpreter._get_np_dtype


def block_init(self, element_ty, shape):
    key = id(element_ty), *shape
    if key not in blocks:
        make_block(self, element_ty, shape)
        blocks[key] = element_ty, dict(vars(self))  # keeps the element type alive, and so its id
    vars(self).update(blocks[key][1])


def tensor_init(self, handle, type):
    key = (*type.shape,) if type.is_block() else ()
    if key not in shapes:
        make_tensor(self, handle, type)
        shapes[key] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shapes[key]


def broadcast_impl_value(self, lhs, rhs):
    kinds = lhs.type, rhs.type
    is_block = [kind.is_block() for kind in kinds]
    if is_block == [False, False] or all(is_block) and [*kinds[0].shape] == [*kinds[1].shape]:
        return lhs, rhs
    return broadcast(self, lhs, rhs)


def numpy_type(kind):
    name = kind.scalar.name
    if name not in numpy_types:
        numpy_types[name] = plain_type(kind)
    return numpy_types[name]


tl.block_type.__init__, tl.tensor.__init__ = block_init, tensor_init
tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
TritonSemantic.broadcast_impl_value = broadcast_impl_value
interpreter._get_np_dtype = numpy_type
