"""Compile Triton kernels without a GPU, because the interpreter accepts what a compiler refuses.

Triton brings its own assembler. A process that interprets cannot compile, so tests run this in another one.
"""

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

HOPPER = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
_ALIGNED = [["tt.divisibility", 16]]


def compile_launches(module, names, call, seen, *, whole=True):
    """Call a function with these kernels of a module replaced, so that they are compiled instead of launched.

    They are compiled to machine code or, unless `whole`, to Triton's own form, which takes a tenth of the
    time and finds all type errors. Adds the variants that are not in `seen` yet, by kernel, types and
    constants. Raises Triton's CompilationError.
    """
    kernels = {name: getattr(module, name) for name in names}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Launcher(kernel, seen, whole))
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def report(names, seen):
    """Print the number of variants by kernel."""
    print({name: sum(key[0] == name for key in seen) for name in names})


class _Launcher:
    """Compiles the variant that a launch needs, specialised as Triton would do it."""

    def __init__(self, kernel, seen, whole):
        self._kernel, self._seen, self._whole = kernel, seen, whole

    def __getitem__(self, grid):
        return self._compile

    def _compile(self, *args, num_warps=4, enable_fp_fusion=True, **kwargs):
        given = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for index, (name, parameter) in enumerate(
            zip(self._kernel.arg_names, self._kernel.params, strict=True)
        ):
            value = given[name]
            special = isinstance(value, int) and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (special and value == 1):
                signature[name], constants[(index,)] = "constexpr", value
                continue
            whole_number = "i32" if isinstance(value, int) and value < 1 << 31 else "i64"
            signature[name] = f"*{_TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else whole_number
            if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
                attributes[(index,)] = _ALIGNED
        key = self._kernel.__name__, *signature.values(), *(str(one) for one in constants.values())
        if key not in self._seen:
            source = ASTSource(fn=self._kernel, signature=signature, constexprs=constants, attrs=attributes)
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            if self._whole:
                self._seen[key] = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
            else:
                self._seen[key] = _first_form(source, options)


def _first_form(source, options):
    """Run the first stage of triton.compile, which is the same in Triton 3.6 and 3.9."""
    backend = make_backend(HOPPER)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(
        HOPPER, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    return str(made)
