"""``accelerate launch [...] -m accelerate_ckpt [options] train.py [arguments]``."""

from accelerate_ckpt.launcher import main

main()
