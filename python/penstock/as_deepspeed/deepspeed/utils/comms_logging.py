"""DeepSpeed's names of penstock.monitor.deepspeed_comms."""

from penstock.monitor.deepspeed_comms import CommsLogger as CommsLogger
from penstock.monitor.deepspeed_comms import calc_bw_log as calc_bw_log
from penstock.monitor.deepspeed_comms import convert_size as convert_size
