"""Libraries that come with an extra."""

import pytest

from sbus.errors import UsageError
from sbus.extras import needs


def test_a_missing_library_is_named_with_the_extra_that_brings_it():
    """If a library of an extra is missing, the error says what to install."""
    with pytest.raises(UsageError, match=r"needs pyarrow.*pip install 'sbusd\[recorder\]'"), needs("recorder"):
        raise ModuleNotFoundError("No module named 'pyarrow.ipc'", name="pyarrow.ipc")


def test_a_module_of_another_library_is_not_blamed_on_the_extra():
    """An import that fails for another reason keeps its own error."""
    with pytest.raises(ModuleNotFoundError), needs("recorder"):
        raise ModuleNotFoundError("No module named 'nonsense'", name="nonsense")
