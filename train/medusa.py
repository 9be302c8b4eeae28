"""accelerate launch train/medusa.py --recipe recipes/smollm2-135m-medusa.yaml [--set section.key=value …]

Trains the Medusa or Hydra heads of a recipe, distilling first where that is not done yet: train/eagle.py under another name, as the recipe says
which head it is. The same command again goes on where it stopped.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Running this file put train/ first on the path: see eagle.py.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    from draftheads.train.eagle import leave, main

    leave(main(__doc__))
