"""Lets the interpreter of Triton 3.6 run with numpy 2.5, for which an array of one is no number."""


def settle_interpreter() -> None:
    """Let scalars of the interpreter be indices, whatever numpy takes for one."""
    import triton
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
