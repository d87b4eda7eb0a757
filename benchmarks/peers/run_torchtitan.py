"""torchtitan: its own trainer with its Llama 3 debug model, as its command line starts it.

It has no way to be timed here as long as it does not start on a CPU; the benchmark lists the error.
"""

import sys

from torchtitan.train import main

sys.argv[1:] = ["--module", "llama3", "--config", "llama3_debugmodel"]
main()
