"""bfloat16 for NumPy, which has no such dtype: uint16 whose metadata says so. Views and slices keep
it, and sync_weights reads it as bfloat16.
"""

from __future__ import annotations

import numpy as np

BF16 = np.dtype(np.uint16, metadata={"rollmesh": "bfloat16"})
