"""Let PyPI's torchvision, a CUDA build, be imported beside a CPU build of torch.

There is no CPU build for this torch. The wheel's C++ extension cannot be loaded without CUDA, which
torchvision tolerates; but then it registers shape functions for two operators that only the extension
declares. So this hook declares those first. The transforms that image processors use are Python over torch's
own operators.

deploy/setup/hook copies this file into site-packages, with a .pth file that imports it in every Python
process, because transformers imports torchvision wherever it is installed. It costs nothing before that.
"""

import sys


class _Finder:
    """Finds torchvision as usual, and wraps what its import executes."""

    @staticmethod
    def find_spec(name, *_):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "DEF")
                library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                module.__dict__["_declared"] = library  # the declarations last as long as this object
            run(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
