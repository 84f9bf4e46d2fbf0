"""Lightning: ``Trainer(strategy=TailcutStrategy(...))``, or ``callbacks=[TailcutCallback(...)]`` with DDP.

Written for Lightning 2.6. Fabric needs neither: ``tailcut.attach`` takes what ``fabric.setup`` returns.
docs/frameworks.md says what is bounded.
"""

from tailcut.lightning.callback import TailcutCallback
from tailcut.lightning.strategy import TailcutStrategy

__all__ = ["TailcutCallback", "TailcutStrategy"]
