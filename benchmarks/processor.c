/* Lets every library of a process believe that the processor has no more than AVX2: torch, oneDNN, FBGEMM, ONNX Runtime.
 *
 *     cc -O2 -shared -fPIC -o processor.so processor.c && LD_PRELOAD=$PWD/processor.so python ...
 *
 * Linux can have the CPUID instruction fault on Intel's processors; it is answered here, without the bits of AVX-512, VNNI and
 * AMX. Where it cannot, only those are answered that somebody replaced by 0F 04, which is no instruction: see
 * `peers.without_newer_instructions`; other libraries must be limited by their own settings.
 * With PROCESSOR=vnni the AVX2 form of VNNI stays, as newer laptops have it; with PROCESSOR=avx512vnni AVX-512 with VNNI,
 * as servers had it before bfloat16.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012 };
static unsigned leaf7[3], leaf7_1[2];
int processor_answers; /* how many questions were answered here */

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)r[REG_RIP];
    if (code[0] != 0x0f || code[1] != (number == SIGILL ? 0x04 : 0xa2)) {
        signal(number, SIG_DFL);
        return;
    }
    processor_answers++;
    unsigned a = r[REG_RAX], c = r[REG_RCX], b, d, leaf = a, sub = c;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && sub == 0) b &= ~leaf7[0], c &= ~leaf7[1], d &= ~leaf7[2];
    if (leaf == 7 && sub == 1) a &= ~leaf7_1[0], d &= ~leaf7_1[1];
    r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
    r[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
    const char *kind = getenv("PROCESSOR");
    leaf7[2] = 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;             /* AMX, fp16 */
    leaf7_1[0] = 1u << 4 | 1u << 5 | 1u << 21 | 1u << 23;             /* AVX-VNNI, bf16, AMX-fp16, AVX-IFMA */
    leaf7_1[1] = 1u << 4 | 1u << 5 | 1u << 8 | 1u << 10 | 1u << 19;   /* newer VNNI, AMX-complex, AVX10 */
    if (!kind || strcmp(kind, "avx512vnni")) {
        leaf7[0] = 1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31;
        leaf7[1] = 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14;
        leaf7[2] |= 1u << 2 | 1u << 3 | 1u << 8;
    }
    if (kind && !strcmp(kind, "vnni")) leaf7_1[0] &= ~(1u << 4);
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, 0);
    sigaction(SIGILL, &action, 0);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
}
