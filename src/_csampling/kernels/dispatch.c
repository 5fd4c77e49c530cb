/* Which kernel table may run on this CPU. Compiled with baseline flags only.
 *
 * An instruction set needs the CPU and the operating system (it saves the registers);
 * __builtin_cpu_supports asks both. On arm64 NEON is the baseline: there is nothing to choose.
 */
#include "kernels.h"

#include <stddef.h>
#include <string.h>

extern const kernels kernels_baseline, kernels_avx2, kernels_avx512, kernels_neon;

static const kernels *const built[] = {
#if defined(MTPLX_HAVE_AVX512)
    &kernels_avx512,
#endif
#if defined(MTPLX_HAVE_AVX2)
    &kernels_avx2,
#endif
#if defined(MTPLX_HAVE_NEON)
    &kernels_neon,
#endif
#if defined(MTPLX_HAVE_BASELINE)
    &kernels_baseline,
#endif
    NULL,
};

static int can_run(const kernels *table)
{
#if defined(MTPLX_HAVE_AVX512)
    if (table == &kernels_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("fma");
#endif
#if defined(MTPLX_HAVE_AVX2)
    /* F16C has no name of its own in older compilers; every CPU with AVX2 has it. */
    if (table == &kernels_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return table != NULL;
}

const kernels *select_kernels(const char *isa)
{
    for (int i = 0; built[i]; ++i)
        if ((isa == NULL || strcmp(isa, built[i]->isa) == 0) && can_run(built[i]))
            return built[i];
    return NULL;
}

const char *built_kernels(int i)
{
    return built[i] ? built[i]->isa : NULL;
}
