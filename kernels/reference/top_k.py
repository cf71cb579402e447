"""Top-k by a full sort."""

import numpy as np


def top_k_logits(row: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values of the k largest, by value descending, then id ascending; NaN last."""
    missing = np.isnan(row)
    order = np.lexsort((np.arange(row.size), -np.where(missing, 0, row), missing))[:k]
    return order.astype(np.int32), row[order]
