"""Makes torch's `is_shared()` raise an error for a storage that may not be read.

Parameters outside of their unit's forward have such storages, and torch's own function would end
the process. An import of this module replaces that function.
"""

import torch


def _is_shared(storage: torch.UntypedStorage) -> bool:
    storage.data_ptr()  # raises for a storage that may not be read
    return torch._C.StorageBase.is_shared(storage)  # type: ignore[attr-defined,no-any-return]


torch.UntypedStorage.is_shared = _is_shared  # type: ignore[method-assign,assignment]
