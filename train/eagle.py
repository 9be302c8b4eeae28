"""accelerate launch train/eagle.py --recipe recipes/smollm2-135m.yaml [--set section.key=value …]

Trains the EAGLE-3 head of a recipe, distilling first where that is not done yet. The same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(description: str | None = __doc__) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, help="recipe (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a value of the recipe; may be repeated")
    options = parser.parse_args()
    # Running this file put train/ first on the path: `import step` and the like would find second copies of our modules.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    from draftheads.recipes.files import blocked
    from draftheads.recipes.schema import Recipe, RecipeError

    try:
        recipe = Recipe.load(options.recipe, options.set)
        from draftheads.train import run

        return run.main(recipe)
    except (RecipeError, OSError) as error:
        line = str(error) if isinstance(error, RecipeError) else blocked(error)
        if line is None:
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {' '.join(line.split())}", file=sys.stderr)
        return 2


def leave(code: int) -> None:
    """Exit. The launcher hides the code, so `specdec train` names a file for it."""
    note = os.environ.get("DRAFTHEADS_EXIT_CODE")
    if note and os.environ.get("RANK", "0") == "0":
        with open(note, "w") as out:
            out.write(str(code))
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
