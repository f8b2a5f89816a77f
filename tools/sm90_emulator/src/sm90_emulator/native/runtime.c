// Replaces the part of CuteDSL's runtime that talks to a device. Compiled programs call these functions. This library must be
// loaded with global symbols before any program is loaded.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

typedef struct {
    uint32_t grid[3], block[3];
    size_t shared_bytes;
    void *stream, *attributes;
    uint32_t attributes_count;
} Config;

typedef struct {
    uint32_t id, padding;
    uint32_t value[16];
} Attribute;

// Python callbacks: each returns 0 or a CUDA error.
typedef int (*LoadLibrary)(const void *image, void **library);
typedef int (*FindKernel)(void *library, const char *name, void **kernel);
typedef int (*LaunchKernel)(void *kernel, const uint32_t *numbers, uint64_t shared_bytes, void **arguments);

static LoadLibrary load_library;
static FindKernel find_kernel;
static LaunchKernel launch_kernel;
static int multiprocessors = 132;

enum { NO_DEVICE = 100, CLUSTER_DIMENSION = 4, PROGRAMMATIC = 6 };

PUBLIC void sm90_emulator_serve(LoadLibrary load, FindKernel find, LaunchKernel launch, int processors) {
    load_library = load, find_kernel = find, launch_kernel = launch, multiprocessors = processors;
}

PUBLIC int _cudaLibraryLoadData(void **library, const void *image, void *o1, void *v1, unsigned n1, void *o2, void *v2, unsigned n2) {
    return load_library ? load_library(image, library) : NO_DEVICE;
}
PUBLIC int _cudaLibraryUnload(void *library) { return 0; }
PUBLIC int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    return find_kernel ? find_kernel(library, name, kernel) : NO_DEVICE;
}
PUBLIC int _cudaGetDevice(int *device) { return *device = 0; }
PUBLIC int _cudaSetDevice(int device) { return 0; }
PUBLIC int _cudaGetDeviceCount(int *count) { return *count = 1, 0; }
PUBLIC int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 16: *value = multiprocessors; break;
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    case 81: *value = 233472; break;  // shared memory per SM
    case 97: *value = 232448; break;  // shared memory per block, opt-in
    case 10: *value = 32; break;
    case 1: *value = 1024; break;
    default: *value = 0;
    }
    return 0;
}
PUBLIC int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { return *value = 0; }
PUBLIC int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
PUBLIC int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
PUBLIC int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *kernel, int size, size_t shared) { return *blocks = 1, 0; }
PUBLIC int _cudaDeviceSynchronize(void) { return 0; }
PUBLIC int _cudaStreamSynchronize(void *stream) { return 0; }

PUBLIC int _cudaLaunchKernelEx(const Config *config, void *kernel, void **arguments) {
    uint32_t numbers[10] = {0};
    memcpy(numbers, config->grid, 12), memcpy(numbers + 3, config->block, 12);
    numbers[6] = numbers[7] = numbers[8] = 1;
    const Attribute *attributes = config->attributes;
    for (uint32_t i = 0; i < config->attributes_count; i++) {
        if (attributes[i].id == CLUSTER_DIMENSION) memcpy(numbers + 6, attributes[i].value, 12);
        if (attributes[i].id == PROGRAMMATIC) numbers[9] = attributes[i].value[0];
    }
    return launch_kernel ? launch_kernel(kernel, numbers, config->shared_bytes, arguments) : NO_DEVICE;
}

PUBLIC int _cudaLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, void *stream, size_t shared,
                             void **arguments) {
    Config config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, 0, 0};
    return _cudaLaunchKernelEx(&config, kernel, arguments);
}

// A program's state is its libraries. They are loaded, and their kernels found, at the first call.
PUBLIC int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int), int (*raise)(const char *, const char *)) {
    if (*state) return 0;
    void **libraries = calloc(64, sizeof *libraries);
    int failed = init(libraries);
    if (!failed) failed = load(libraries, 0);
    if (failed) {
        free(libraries);
        raise("RuntimeError", "the emulator did not load the program");
        return -1;
    }
    *state = libraries;
    return 0;
}
PUBLIC void cuda_dialect_unload_library_once(void **state) {}
