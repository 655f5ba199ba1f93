// What move.cu needs of a card, for a host: one thread of the host per thread of a block, blocks one after another.

#include <pthread.h>

#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static

struct Index {
    unsigned int x;
};

static thread_local Index threadIdx;
static Index blockIdx, blockDim, gridDim;
static pthread_barrier_t whole_block;
static unsigned long long lanes[1024];

static void __syncthreads() { pthread_barrier_wait(&whole_block); }
static void __threadfence() { __sync_synchronize(); }
static void __threadfence_system() { __sync_synchronize(); }

static unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}

// All threads of a block come here, as the kernel has it.
static unsigned long long __shfl_down_sync(unsigned int, unsigned long long value, unsigned int distance) {
    const unsigned int lane = threadIdx.x % 32;
    lanes[threadIdx.x] = value;
    __syncthreads();
    const unsigned long long other = lane + distance < 32 ? lanes[threadIdx.x + distance] : value;
    __syncthreads();
    return other;
}

template <typename Kernel>
static void launch(unsigned int num_blocks, unsigned int num_threads, Kernel kernel) {
    gridDim.x = num_blocks;
    blockDim.x = num_threads;
    pthread_barrier_init(&whole_block, nullptr, num_threads);
    for (unsigned int block = 0; block < num_blocks; block++) {
        blockIdx.x = block;
        std::vector<std::thread> threads;
        for (unsigned int index = 0; index < num_threads; index++) {
            threads.emplace_back([=] {
                threadIdx.x = index;
                kernel();
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
    pthread_barrier_destroy(&whole_block);
}
