//! Kernel modules from the initramfs, in the order the build of the initrd worked out.

use std::fs::{self, File};

use crate::sys;

pub fn load_all() -> Result<(), String> {
    let order = fs::read_to_string("/modules.load").unwrap_or_default();
    for name in order.split_whitespace() {
        let file = File::open(format!("/modules/{name}")).map_err(|e| format!("{name}: {e}"))?;
        match sys::load_module(&file) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
            Err(error) => return Err(format!("module {name} does not load: {error}")),
        }
    }
    Ok(())
}
