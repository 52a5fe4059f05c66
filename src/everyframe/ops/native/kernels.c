/* All kernels, as one source. */

#include "activation.c"
#include "frame_attention.c"
#include "group_norm.c"
#include "row_norm.c"
#include "winograd.c"
