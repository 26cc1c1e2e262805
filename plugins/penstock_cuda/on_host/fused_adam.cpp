// The source of the plugin, compiled for the host: its results are tested without a GPU.
#include "plugins/penstock_cuda/fused_adam.cu"
