/* What this processor can run, and which kernel serves which format. */
#include <string.h>

#include "native.h"

const float fl_fp4_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* 2^(e - 127); 255 is not a number. */
float fl_e8m0(uint8_t exponent) {
    uint32_t pattern = exponent == 255 ? 0x7FC00000u : exponent == 0 ? 0x00400000u : (uint32_t)exponent << 23;
    float value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

int fl_abi(void) { return FL_ABI; }

#if defined(__x86_64__)
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

int fl_isa_supported(int isa) {
    __builtin_cpu_init();
    int bf16 = has_avx512() && __builtin_cpu_supports("avx512bf16");
    int vnni = has_avx512() && __builtin_cpu_supports("avx512vnni");
    switch (isa) {
        case FL_SCALAR: return 1;
        case FL_AVX2: return has_avx2();
        case FL_AVX512: return has_avx512();
        case FL_AVX512_BF16: return bf16;
        case FL_AVX512_VNNI: return vnni;
        case FL_AVX512_ALL: return bf16 && vnni;
        default: return 0;
    }
}

fl_choice fl_choose(int isa, int format, int bf16_inputs) {
    int x_kind = format == FL_MXFP4 ? FL_X_MX : FL_X_F32;
    int pairs = isa == FL_AVX512_BF16 || isa == FL_AVX512_ALL, vnni = isa == FL_AVX512_VNNI || isa == FL_AVX512_ALL;
    if (pairs && format == FL_BF16 && bf16_inputs) return (fl_choice){fl_avx512_bf16_rows, FL_X_BF16};
    if (vnni && format == FL_INT8) return (fl_choice){fl_avx512_vnni_rows, FL_X_I16};
    if (isa == FL_SCALAR) return (fl_choice){fl_scalar_kernels[format], x_kind};
    return (fl_choice){(isa == FL_AVX2 ? fl_avx2_kernels : fl_avx512_kernels)[format], x_kind};
}
#else
int fl_isa_supported(int isa) { return isa == FL_SCALAR; }

fl_choice fl_choose(int isa, int format, int bf16_inputs) {
    (void)isa, (void)bf16_inputs;
    return (fl_choice){fl_scalar_kernels[format], format == FL_MXFP4 ? FL_X_MX : FL_X_F32};
}
#endif
