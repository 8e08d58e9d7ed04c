// Which instruction sets were compiled (setup.py says so), for the tables of variants that are numbered as the caller numbers
// them, slowest first: a null pointer stands for one that was not.
#pragma once

#if defined(HAVE_BASELINE)
#define IF_BASELINE(x) &x
#else
#define IF_BASELINE(x) nullptr
#endif

#if defined(HAVE_AVX2)
#define IF_AVX2(x) &x
#else
#define IF_AVX2(x) nullptr
#endif

#if defined(HAVE_AVX512)
#define IF_AVX512(x) &x
#else
#define IF_AVX512(x) nullptr
#endif

#if defined(HAVE_AVX512_BF16)
#define IF_AVX512_BF16(x) &x
#else
#define IF_AVX512_BF16(x) nullptr
#endif

#if defined(HAVE_AMX)
#define IF_AMX(x) &x
#else
#define IF_AMX(x) nullptr
#endif
