"""Which tokens of a forward write their key and value. Pure NumPy.

A token outside its forward's window writes to the sink. Guards: the window is named in the plan's tokens, the mask in
the forward's.
"""

import numpy as np

from protos.wire.plan import WriteWindow

Array = np.ndarray


def write_mask(window: WriteWindow, *, token_begin: int, columns: Array) -> Array:
    """[num_tokens] bool: which of a forward's tokens write.

    Args:
        window: of the forward.
        token_begin: index in the plan of the forward's first token.
        columns: [num_tokens] index of each token in its row's tokens.
    """
    if window.columns is not None:
        begin, end = window.columns
        return (columns >= begin) & (columns < end)
    plan_index = np.arange(token_begin, token_begin + len(columns))
    if window.run is not None:
        begin, end = window.run
        return (plan_index >= begin) & (plan_index < end)
    assert window.flat_index is not None
    return np.isin(plan_index, window.flat_index)
