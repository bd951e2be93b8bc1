import sys

from clustrs.cli import main

sys.exit(main())
