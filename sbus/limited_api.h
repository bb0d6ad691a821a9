/* For a build with Py_LIMITED_API, whose extension modules work with each later Python: the macros that the limited API
 * replaces by functions. setup.py has the compiler include it first. */
#ifndef SBUS_LIMITED_API_H
#define SBUS_LIMITED_API_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PyBytes_AS_STRING PyBytes_AsString
#define PyBytes_GET_SIZE PyBytes_Size

#endif
