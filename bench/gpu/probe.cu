// Measures alone what the design of moeba's GPU part relies on.
//
//   nvcc -O2 -std=c++17 -arch=sm_90 probe.cu -o probe -ldl
//   probe hang [ROUNDS]        the order of src/forward/gpu/decode_pipeline; exit code 3: it hangs
//   probe hang ROUNDS copies   the order that moeba had before: copies behind a stream's wait
//   probe rates                tensor-core forms, graph nodes, copies, link, packing, pinning
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#define OK(x)                                               \
    do {                                                    \
        cudaError_t e_ = (x);                               \
        if (e_ != cudaSuccess) {                            \
            printf("%s: %s\n", #x, cudaGetErrorString(e_)); \
            exit(2);                                        \
        }                                                   \
    } while (0)
static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

__global__ void tiny(float* x) { x[threadIdx.x] += 1.0f; }
// A routing for the host, by stores into its memory.
__global__ void post(const unsigned* from, unsigned* to) {
    to[blockIdx.x * 256 + threadIdx.x] = from[blockIdx.x * 256 + threadIdx.x];
}

typedef int (*StreamValue)(void*, unsigned long long, unsigned, unsigned);
static StreamValue stream_value(const char* name) {
    void* lib = dlopen("libcuda.so.1", RTLD_NOW);
    return lib ? (StreamValue)dlsym(lib, name) : nullptr;
}

static int hang(int rounds, bool copies) {
    StreamValue wait = stream_value("cuStreamWaitValue32_v2"),
                write = stream_value("cuStreamWriteValue32_v2");
    if (!wait || !write) return printf("there is no driver with cuStreamWaitValue32_v2\n"), 2;
    int low, high;
    OK(cudaDeviceGetStreamPriorityRange(&low, &high));
    cudaStream_t a, tables, late, link[2];
    for (auto s : {&a, &tables, &late})
        OK(cudaStreamCreateWithPriority(s, cudaStreamNonBlocking, high));
    for (auto& s : link) OK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, low));
    const size_t table = 64 << 10, piece = 1 << 20;
    float* x;
    char *t, *parts, *slots;
    unsigned* go;
    OK(cudaMalloc(&x, 4096));
    OK(cudaMemset(x, 0, 4096));
    OK(cudaMalloc(&t, table));
    OK(cudaMemset(t, 0, table));
    OK(cudaMalloc(&parts, table));
    OK(cudaMalloc(&slots, 2 * piece));
    char *up, *pieces;
    unsigned *words, *down;
    OK(cudaMallocHost(&up, table));
    OK(cudaMallocHost(&pieces, 2 * piece));
    OK(cudaMallocHost(&words, 4 * (rounds + 2)));
    OK(cudaHostAlloc(&down, table, cudaHostAllocMapped));
    if (copies) {
        OK(cudaMalloc(&go, 4));
        OK(cudaMemset(go, 0, 4));
    } else {
        OK(cudaHostAlloc(&go, 4, cudaHostAllocMapped));
        *go = 0;
    }
    OK(cudaDeviceSynchronize());
    cudaGraph_t g;
    cudaGraphExec_t graph;
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 20; i++) tiny<<<1, 256, 0, a>>>(x);
    OK(cudaStreamEndCapture(a, &g));
    OK(cudaGraphInstantiate(&graph, g, 0));
    OK(cudaGraphUpload(graph, a));
    cudaEvent_t routed, ready;
    OK(cudaEventCreateWithFlags(&routed, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    double start = now(), worst = 0;
    for (int r = 1; r <= rounds; r++) {
        for (int i = 0; i < 2; i++)
            OK(cudaMemcpyAsync(slots + i * piece, pieces + i * piece, piece, cudaMemcpyHostToDevice,
                               link[i]));
        auto layer = [&] {
            // Its table, its graph, and what the host gets.
            OK(cudaMemcpyAsync(t, up, table, cudaMemcpyHostToDevice, copies ? a : tables));
            if (!copies) {
                OK(cudaEventRecord(ready, tables));
                OK(cudaStreamWaitEvent(a, ready, 0));
            }
            OK(cudaGraphLaunch(graph, a));
            if (copies)
                OK(cudaMemcpyAsync(down, t, 8192, cudaMemcpyDeviceToHost, a));
            else
                post<<<8, 256, 0, a>>>((const unsigned*)t, down);
            OK(cudaEventRecord(routed, a));
        };
        layer();
        if (wait(a, (unsigned long long)go, r, 0)) return printf("wait refused\n"), 2;
        tiny<<<1, 256, 0, a>>>(x);
        OK(cudaEventSynchronize(routed));
        // The next layer's attention stands behind the wait; in the old order its copies as well.
        if (copies)
            layer();
        else
            OK(cudaGraphLaunch(graph, a));
        double begin = now();
        OK(cudaMemcpyAsync(parts, up, table, cudaMemcpyHostToDevice, late));
        tiny<<<1, 256, 0, late>>>(x + 512);
        words[r] = r;
        if (copies)
            OK(cudaMemcpyAsync(go, words + r, 4, cudaMemcpyHostToDevice, late));
        else if (write(late, (unsigned long long)go, r, 0))
            return printf("write refused\n"), 2;
        cudaStreamQuery(late);
        for (;;) {
            cudaError_t e = cudaStreamQuery(a);
            if (e == cudaSuccess) break;
            if (e != cudaErrorNotReady) return printf("%s\n", cudaGetErrorString(e)), 2;
            if (now() - begin > 3) {
                printf("HANG in round %d: late stream %s\n", r,
                       cudaStreamQuery(late) == cudaSuccess ? "done" : "stuck");
                fflush(stdout);
                _exit(3);
            }
        }
        worst = worst > now() - begin ? worst : now() - begin;
    }
    printf("hang test (%s): %d rounds, %.1f us a round, slowest %.1f us\n",
           copies ? "copies behind the wait" : "no copy behind the wait", rounds,
           1e6 * (now() - start) / rounds, 1e6 * worst);
    return 0;
}

template <int FORM>
__global__ void __launch_bounds__(256) imma(int* out, int n) {
    int d[8][4] = {};
    unsigned a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {threadIdx.x, 5};
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int c = 0; c < 8; c++) {
            if (FORM == 0) {
#pragma unroll
                for (int p = 0; p < 4; p++)
                    asm volatile(
                        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, "
                        "{%0,%1};"
                        : "+r"(d[c][2 * (p % 2)]), "+r"(d[c][2 * (p % 2) + 1])
                        : "r"(a[p]), "r"(b[p / 2]));
            } else if (FORM == 1) {
#pragma unroll
                for (int p = 0; p < 2; p++)
                    asm volatile(
                        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, "
                        "{%6}, {%0,%1,%2,%3};"
                        : "+r"(d[c][0]), "+r"(d[c][1]), "+r"(d[c][2]), "+r"(d[c][3])
                        : "r"(a[2 * p]), "r"(a[2 * p + 1]), "r"(b[p]));
            } else {
                asm volatile(
                    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                    "{%8,%9}, {%0,%1,%2,%3};"
                    : "+r"(d[c][0]), "+r"(d[c][1]), "+r"(d[c][2]), "+r"(d[c][3])
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
            }
        }
    int s = 0;
    for (int c = 0; c < 8; c++) s += d[c][0] + d[c][1] + d[c][2] + d[c][3];
    if (s == 123456789) *out = s;
}

template <class F>
static double ms_of(cudaStream_t s, int n, F f) {
    cudaEvent_t a, b;
    OK(cudaEventCreate(&a));
    OK(cudaEventCreate(&b));
    f();
    OK(cudaStreamSynchronize(s));
    OK(cudaEventRecord(a, s));
    for (int i = 0; i < n; i++) f();
    OK(cudaEventRecord(b, s));
    OK(cudaEventSynchronize(b));
    float ms;
    OK(cudaEventElapsedTime(&ms, a, b));
    return ms / n;
}

static int rates() {
    cudaDeviceProp p;
    OK(cudaGetDeviceProperties(&p, 0));
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    int* out;
    OK(cudaMalloc(&out, 4));
    float* x;
    OK(cudaMalloc(&x, 1 << 20));
    int blocks = 2 * p.multiProcessorCount, n = 4000;
    double ops = 2.0 * blocks * 8 * n * 8 * 4096;
    printf("%s, %d SMs\nint8 mma.sync: m8n8k16 %.0f TOPS, ", p.name, p.multiProcessorCount,
           ops / ms_of(s, 3, [&] { imma<0><<<blocks, 256, 0, s>>>(out, n); }) / 1e9);
    printf("m16n8k16 %.0f, ",
           ops / ms_of(s, 3, [&] { imma<1><<<blocks, 256, 0, s>>>(out, n); }) / 1e9);
    printf("m16n8k32 %.0f\n",
           ops / ms_of(s, 3, [&] { imma<2><<<blocks, 256, 0, s>>>(out, n); }) / 1e9);
    char *h, *d;
    OK(cudaMallocHost(&h, 64 << 20));
    OK(cudaMalloc(&d, 64 << 20));
    for (int form = 0; form < 4; form++) {
        cudaGraph_t g;
        cudaGraphExec_t e;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < 25; i++) tiny<<<1, 256, 0, s>>>(x);
        if (form == 1) OK(cudaMemcpyAsync(h, d, 1024, cudaMemcpyDeviceToHost, s));
        OK(cudaStreamEndCapture(s, &g));
        OK(cudaGraphInstantiate(&e, g, 0));
        double us =
            1e3 * ms_of(s, 200, [&] {
                OK(cudaGraphLaunch(e, s));
                if (form == 2)
                    for (int i = 0; i < 3; i++)
                        OK(cudaMemcpyAsync(h + 8192 * i, d, 8192, cudaMemcpyDeviceToHost, s));
                if (form == 3) OK(cudaMemcpyAsync(d, h, 4, cudaMemcpyHostToDevice, s));
            });
        const char* what[] = {"25 kernels", "25 kernels and a copy down inside",
                              "then 3 copies down", "then a word up"};
        double t = now();
        for (int i = 0; i < 200; i++) OK(cudaGraphLaunch(e, s));
        t = now() - t;
        OK(cudaStreamSynchronize(s));
        printf("graph of %s: %.1f us (host: %.1f us a launch)\n", what[form], us, 1e6 * t / 200);
    }
    double us = 1e3 * ms_of(s, 40, [&] {
                    for (int i = 0; i < 25; i++) tiny<<<1, 256, 0, s>>>(x);
                });
    printf("25 kernels without a graph: %.1f us\n", us);
    for (size_t chunk : {64u << 10, 256u << 10, 1u << 20, 4u << 20}) {
        double ms = ms_of(s, 4, [&] {
            for (size_t at = 0; at + chunk <= (32u << 20); at += chunk)
                OK(cudaMemcpyAsync(d + at, h + at, chunk, cudaMemcpyHostToDevice, s));
        });
        printf("up in pieces of %zu KiB: %.1f GB/s\n", chunk >> 10, (32 << 20) / ms / 1e6);
    }
    size_t big = 4ull << 30;
    char* m = (char*)mmap(nullptr, big, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(m, 1, big);
    char* wc;
    OK(cudaHostAlloc(&wc, 64 << 20, cudaHostAllocWriteCombined));
    for (int threads : {1, 2, 4, 8}) {
        for (char* to : {h, wc}) {
            double t = now();
            std::vector<std::thread> all;
            for (int i = 0; i < threads; i++)
                all.emplace_back([&, i] {
                    for (size_t at = 0; at + (8 << 20) <= big / 8 / threads; at += 8 << 20)
                        memcpy(to + i * (8 << 20) % (64 << 20), m + i * (big / 8) + at, 8 << 20);
                });
            for (auto& a : all) a.join();
            printf("packing by %d threads into %s memory: %.1f GB/s\n", threads,
                   to == h ? "pinned" : "write-combined", big / 8 / (now() - t) / 1e9);
        }
    }
    double t = now();
    OK(cudaHostRegister(m, big, cudaHostRegisterDefault));
    printf("pinning 4 GiB that is there: %.2f s\n", now() - t);
    printf("up from it: %.1f GB/s\n",
           big / 16 / ms_of(s, 4, [&] {
               OK(cudaMemcpyAsync(d, m, 64 << 20, cudaMemcpyHostToDevice, s));
               OK(cudaMemcpyAsync(d, m + (1 << 30), 64 << 20, cudaMemcpyHostToDevice, s));
               OK(cudaMemcpyAsync(d, m + (2u << 30), 64 << 20, cudaMemcpyHostToDevice, s));
               OK(cudaMemcpyAsync(d, m + (3ull << 30), 64 << 20, cudaMemcpyHostToDevice, s));
           }) / 1e6);
    return 0;
}

int main(int argc, char** argv) {
    if (argc > 1 && !strcmp(argv[1], "hang")) return hang(argc > 2 ? atoi(argv[2]) : 300, argc > 3);
    return rates();
}
