"""What all kernel tests need in Triton's interpreter."""

from typing import Any

import pytest
from kernel_cases import INTERPRETED


@pytest.fixture(autouse=True, scope="session")
def _index_of_one_element() -> None:
    """Triton 3.6's interpreter takes int() of arrays with one element, which NumPy 2.4 refuses."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
