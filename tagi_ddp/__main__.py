"""``python -m tagi_ddp`` is the command ``tagi-ddp``."""

import sys

from tagi_ddp.commands.main import main

sys.exit(main())
