// What this process may use of the machine: processors by affinity and control group, instruction sets by CPUID.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace octavo {

// Processors in this thread's affinity mask, at least 1.
int affinity_cpus();
// CPU time a control group grants, in whole processors rounded down but at least 1; 0: no limit. Reads the file that
// lists the process's groups (/proc/self/cgroup) and the tree under `root` (/sys/fs/cgroup), version 1 or 2; the
// tightest limit on the way up to the root counts.
int cgroup_cpus(const std::string& groups_file, const std::string& root);
// min of the two.
int available_threads();

// Levels in this build, weakest first.
std::vector<std::string> known_isa_levels();
// Those of them this machine can run. Includes whether the operating system saves the registers; "amx" asks it for permission to
// use tiles, once for the process, and has passed a self-test.
std::vector<std::string> isa_levels();
// The kernels of a level; "" means OCTAVO_CPU_ISA if set, else the strongest. std::invalid_argument when unknown or not
// supported here.
const Kernels& kernels_for(const std::string& level);

}  // namespace octavo
