#define ISA neon
#include "kernels_body.h"
