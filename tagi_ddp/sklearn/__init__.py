"""TAGI networks as estimators of scikit-learn; needs the extra ``sklearn``."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("sklearn") is None:
    raise ImportError("tagi_ddp.sklearn needs scikit-learn: pip install '.[sklearn]'")

from tagi_ddp.sklearn.estimators import TAGIClassifier, TAGIRegressor

__all__ = ["TAGIClassifier", "TAGIRegressor"]
