/* A stand-in for NVIDIA's management library: three GPUs whose answers are known functions of time.
 *
 * GPU 0: 300 W + 100 W sin(2 pi t / 2 s), t seconds since 1970; power-capped where that is above 350 W; counts its energy.
 * GPU 1: 200 W, tells neither its energy counter nor its utilisation; nothing holds it back; a set clock only.
 * GPU 2: as GPU 0, but at 50 W and idle.
 * STAND_IN_GPUS: how many of them there are (default 2); STAND_IN_NO_POWER: the number of one that tells neither power nor
 * energy.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3 };
typedef struct { unsigned int gpu, memory; } rates_t;
typedef struct { unsigned long long total, free, used; } memory_t;

static const double OMEGA = 3.14159265358979323846;
static int numbers[3] = {0, 1, 2};
static int of(void *device) { return *(int *)device; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int silent(int gpu) {
    const char *text = getenv("STAND_IN_NO_POWER");
    return text && atoi(text) == gpu;
}

static double watts(int gpu, double t) {
    return gpu == 0 ? 300 + 100 * sin(OMEGA * t) : gpu == 1 ? 200 : 50;
}

/* The integral of the watts, up to a constant. */
static double joules(int gpu, double t) {
    double s = t - 1.7e9; /* a multiple of the period; keeps the digits */
    return gpu == 0 ? 300 * s - 100 / OMEGA * cos(OMEGA * s) : 50 * s;
}

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "an error"; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    const char *text = getenv("STAND_IN_GPUS");
    *count = text ? (unsigned)atoi(text) : 2;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (index > 2) return INVALID;
    *device = &numbers[index];
    return OK;
}

int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    snprintf(name, length, "Stand-in, model %d", of(device));
    return OK;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-00000000000%d", of(device));
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *device, rates_t *rates) {
    if (of(device) == 1) return NOT_SUPPORTED;
    rates->gpu = of(device) ? 0 : 97;
    rates->memory = of(device) ? 0 : 40;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    (void)device;
    memory->total = 80ULL << 30;
    memory->used = 20ULL << 30;
    memory->free = 60ULL << 30;
    return OK;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
    (void)sensor;
    *celsius = 61 + of(device);
    return OK;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
    if (silent(of(device))) return NOT_SUPPORTED;
    *milliwatts = (unsigned)lround(1000 * watts(of(device), now()));
    return OK;
}

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *milliwatts) {
    (void)device;
    *milliwatts = 400000;
    return OK;
}

int nvmlDeviceGetClockInfo(void *device, int clock, unsigned int *mhz) {
    (void)device;
    *mhz = clock == 1 ? 1980 : 2619; /* SM, memory */
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    int gpu = of(device);
    *reasons = gpu == 0 ? (watts(0, now()) > 350 ? 0x24 : 0) : gpu == 1 ? 0x2 : 0x1;
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    if (of(device) == 1 || silent(of(device))) return NOT_SUPPORTED;
    *millijoules = (unsigned long long)llround(1000 * joules(of(device), now()));
    return OK;
}
