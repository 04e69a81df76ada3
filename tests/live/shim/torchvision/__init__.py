"""Let PyPI's torchvision import beside the CPU build of torch.

Its compiled ops do not load there, and its __init__ then fails with
"operator torchvision::nms does not exist". Declaring the op (never called by
text-only serving) is enough for all of its pure-Python parts.
"""

import os
import sys
from importlib.machinery import PathFinder

import torch

_shim_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_spec = PathFinder.find_spec("torchvision", [p for p in sys.path if os.path.abspath(p or ".") != _shim_root])
if _spec is None:
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
_lib = torch.library.Library("torchvision", "FRAGMENT")
for _op in ("nms", "qnms"):
    _lib.define(_op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

__path__ = list(_spec.submodule_search_locations)
__file__ = _spec.origin
__spec__.submodule_search_locations = __path__
with open(_spec.origin) as _f:
    exec(compile(_f.read(), _spec.origin, "exec"))
