/* All kernels, as one source. */

#include "activation.c"
#include "attention.c"
#include "channels_last.c"
#include "frame_attention.c"
#include "gated_linear.c"
#include "group_norm.c"
#include "rotation.c"
#include "row_norm.c"
#include "winograd.c"
