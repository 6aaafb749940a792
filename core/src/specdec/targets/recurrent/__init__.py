"""Recording how a window updates recurrent state, so that part of the window can be dropped.

The modules that are given a recurrent cache are found once, by looking into a call of the model
(``units``). For the length of a recorded call each is wrapped (``recorder``), and what a row is
after part of the window is found in the cheapest way that there is:

- ``convolutions``: a convolution's state is a slice of its input, which is kept;
- ``gated_delta``: where the update is a loop over positions in Python, as the gated delta rule is
  on CPU and CUDA, the states between the steps are kept; on CUDA one kernel (``kernel``, ``cuda``)
  does what the loop does and gives all states, in prompts and single positions too;
- ``calls``: else the module is run again over the kept positions, from its inputs and what its
  projections gave; only what the state needs is then computed. This works for any module.

On a backend that gives a position the same bits in a window of any width, a module that does not
(a chunked form of the recurrence) is run position by position, so that it does too.
"""

from specdec.targets.recurrent.recorder import Recurrence

__all__ = ["Recurrence"]
