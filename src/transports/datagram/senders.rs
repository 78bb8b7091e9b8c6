//! The address of the last sender, both as the kernel and as Python has it.
//!
//! A server that answers passes the very object on that `datagram_received` got, which then needs no second look; and a
//! peer that sends several datagrams in a row has its object made once.

use std::cell::RefCell;

use grapeshot_core::sys::socket::Address;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::object_cell::ObjectCell;
use crate::binding::socket_object;

pub(super) struct Senders {
    address: RefCell<Option<Address>>,
    /// What stands for `address`: tuples, str and bytes, which cannot change.
    object: ObjectCell,
}

impl Senders {
    pub(super) const fn new() -> Self {
        Self {
            address: RefCell::new(None),
            object: ObjectCell::empty(),
        }
    }

    /// The object for the sender of a datagram.
    #[inline]
    pub(super) fn object_of<'py>(&self, py: Python<'py>, sender: Address) -> PyResult<Bound<'py, PyAny>> {
        if self.address.borrow().as_ref() == Some(&sender)
            && let Some(object) = self.object.get(py)
        {
            return Ok(object);
        }
        let object = socket_object::address_object(py, &sender)?;
        if object.is_none() {
            return Ok(object); // of a sender without a name, to which nothing can be sent
        }
        self.object.set(object.clone());
        self.address.replace(Some(sender));
        Ok(object)
    }

    /// The address of the last sender, if `object` is the one that stands for it.
    #[inline]
    pub(super) fn address_of(&self, object: *mut ffi::PyObject) -> Option<Address> {
        if self.object.as_ptr() != object {
            return None;
        }
        self.address.borrow().clone()
    }

    /// The cell, for the collector.
    pub(super) fn cell(&self) -> &ObjectCell {
        &self.object
    }
}
