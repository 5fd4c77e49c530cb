#define ISA avx512
#include "kernels_body.h"
