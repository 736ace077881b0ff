# Instructions a machine may lack must stay inside the level that is chosen for it. Run before linking, on what is linked:
#   OBJECTS  object files of the levels: each may define nothing but its tables, so that the linker can merge no function of
#            theirs with one of the same name elsewhere, and may run nothing when the module is loaded;
#   OTHERS   every other object file and library: disassembled, they may hold no AVX or AMX instruction (x86 only).
# NM, OBJDUMP: the tools; without OBJDUMP (or with ALLOW_AVX, where the user's own flags ask for such instructions) OTHERS
# are not looked at.
cmake_policy(SET CMP0057 NEW)

foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "cannot list the symbols of ${object}")
  endif()
  string(REGEX MATCHALL "[0-9a-fA-F]+ [A-Zuvw] [^\n]+" defined "${symbols}")
  foreach(symbol IN LISTS defined)
    if(NOT symbol MATCHES " [DRS] _ZN6octavo[0-9]+k[A-Za-z0-9]+(Kernels|Probes)E$" AND NOT symbol MATCHES "(asan|ubsan|__odr)")
      message(FATAL_ERROR "${object} defines ${symbol}: level code must have internal linkage")
    endif()
  endforeach()
  if(OBJDUMP AND NOT symbols MATCHES "(asan|ubsan)")
    execute_process(COMMAND ${OBJDUMP} -h ${object} OUTPUT_VARIABLE sections RESULT_VARIABLE failed)
    if(failed)
      message(FATAL_ERROR "cannot list the sections of ${object}")
    endif()
    if(sections MATCHES "\\.(init_array|ctors|preinit_array)")
      message(FATAL_ERROR "${object} runs code when the module is loaded, whatever the machine: no static initialisers in a level")
    endif()
  endif()
endforeach()

if(NOT OBJDUMP OR ALLOW_AVX)
  message(STATUS "instructions outside the levels are not checked")
  return()
endif()
# What a disassembler writes for VEX and EVEX: mnemonics with a v before (but verr and verw), and AVX-512's mask registers and AMX's tiles.
set(vector "v([a-df-z]|e[a-qs-z])[a-z0-9]*")
set(mask "k(mov|or|and|xor|xnor|not|test|add|unpck|shift)[a-z]*")
set(tile "tile[a-z0-9]+|tdp[a-z0-9]+|(ld|st)tilecfg")
set(avx "^ *[0-9a-f]+:\t(\\{[a-z]+\\} )?(${vector}|${mask}|${tile})( |$)")
foreach(object IN LISTS OTHERS)
  execute_process(
    COMMAND ${OBJDUMP} -d --no-show-raw-insn ${object}
    COMMAND grep -E -m 1 "${avx}"
    OUTPUT_VARIABLE found RESULTS_VARIABLE results ERROR_VARIABLE errors)
  list(GET results 1 none)
  if(none EQUAL 0)
    string(STRIP "${found}" found)
    message(FATAL_ERROR "${object} has an instruction that only some levels may use: ${found}")
  elseif(NOT none EQUAL 1 OR errors)
    message(FATAL_ERROR "cannot disassemble ${object}: ${errors}")
  endif()
endforeach()
